#pragma once
/// The launcher's messages, in printf's form: the compiler checks it, and it compiles fastest.

#include <string>

#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>

namespace chorus::detail {

[[gnu::format(printf, 1, 2)]] std::string format(const char* form, ...);

[[noreturn, gnu::format(printf, 1, 2)]] void usage_error(const char* form, ...);

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/launch/message_impl.hpp>
#endif
