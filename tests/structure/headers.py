#!/usr/bin/env python3
"""Checks every header under include/: guard, opening comment, lines of at most 120 columns, includes that exist and
never point up a floor, macros, and that the headers of the standard library that it uses come with it."""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
FLOOR = {"core": 1, "train": 1, "tensor": 2, "kernels": 3, "autograd": 3, "comm": 3, "launch": 3, "data": 3, "ops": 4, "nn": 5,
         "optim": 6, "io": 6, "parallel": 6, "quantization": 6, "same_bits": 6, "simulate": 6, "trace": 6, "testing": 6, "compiled": 7}
# Macros that may outlive the header that defines them.
KEPT = re.compile(r"CHORUS_\w+|EIGEN_NO_CUDA|OMPI_SKIP_MPICXX|MPICH_SKIP_MPICXX")

# Where the names of namespace std that headers use come from. Checked here, because headers_alone is compiled with a
# precompiled header that includes all of them.
STANDARD = {
    "algorithm": "adjacent_find all_of any_of binary_search clamp copy copy_n count count_if equal fill fill_n find "
                 "find_if for_each is_sorted is_sorted_until lower_bound make_heap max max_element min min_element minmax "
                 "minmax_element none_of nth_element partial_sort partition_point pop_heap push_heap ranges replace "
                 "reverse reverse_copy sort sort_heap stable_partition stable_sort transform unique upper_bound",
    "any": "any any_cast",
    "array": "array to_array",
    "atomic": "atomic atomic_ref atomic_thread_fence memory_order_acq_rel memory_order_acquire memory_order_relaxed "
              "memory_order_release",
    "bit": "bit_cast bit_ceil bit_width countl_zero countr_zero endian has_single_bit popcount",
    "cctype": "isspace",
    "charconv": "from_chars from_chars_result to_chars",
    "chrono": "chrono",
    "cmath": "abs atan2 ceil copysign cos erf exp expm1 fabs floor fmod frexp hypot isfinite isinf isnan ldexp lgamma log log1p log2 llround lround nearbyint "
             "nextafter pow round sin sqrt tan tanh",
    "complex": "complex",
    "concepts": "constructible_from convertible_to derived_from floating_point integral invocable regular same_as unsigned_integral",
    "condition_variable": "condition_variable condition_variable_any",
    "cstdarg": "va_list",
    "cstddef": "byte max_align_t nullptr_t ptrdiff_t size_t to_integer",
    "cstdint": "int8_t int16_t int32_t int64_t intptr_t uint8_t uint16_t uint32_t uint64_t uintptr_t",
    "cstdio": "setvbuf FILE fclose ferror fflush fopen fprintf fputc fputs fread fwrite printf rename snprintf vsnprintf",
    "cstdlib": "_Exit abort aligned_alloc exit free getenv malloc strtol strtoll",
    "cstring": "memcmp memcpy memmove memset strchr strcmp strerror strlen strncmp",
    "deque": "deque",
    "exception": "current_exception exception exception_ptr rethrow_exception terminate uncaught_exceptions",
    "filesystem": "filesystem",
    "fstream": "ifstream",
    "future": "future future_status promise",
    "functional": "bit_or divides equal_to function greater hash identity invoke less minus multiplies plus ref",
    "initializer_list": "initializer_list",
    "istream": "istream",
    "iterator": "back_inserter default_sentinel_t distance istreambuf_iterator next prev size",
    "latch": "latch",
    "limits": "numeric_limits",
    "list": "list",
    "map": "map multimap",
    "queue": "priority_queue",
    "ratio": "femto",
    "semaphore": "binary_semaphore",
    "set": "set multiset",
    "memory": "addressof enable_shared_from_this make_shared make_unique make_unique_for_overwrite shared_ptr "
              "unique_ptr weak_ptr",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock try_to_lock unique_lock",
    "new": "align_val_t bad_alloc launder nothrow",
    "numbers": "numbers",
    "numeric": "accumulate gcd inner_product iota reduce",
    "optional": "nullopt optional",
    "span": "as_bytes as_writable_bytes dynamic_extent span",
    "stdexcept": "invalid_argument logic_error runtime_error",
    "stop_token": "stop_token",
    "streambuf": "streambuf",
    "string": "getline stoi stol string to_string",
    "string_view": "string_view string_view_literals",
    "system_error": "errc error_code system_error",
    "thread": "jthread this_thread thread",
    "tuple": "apply forward_as_tuple get make_from_tuple make_tuple tie tuple tuple_cat tuple_element tuple_element_t tuple_size "
             "tuple_size_v",
    "type_traits": "conditional_t decay_t enable_if_t false_type integral_constant invoke_result_t is_aggregate_v is_arithmetic_v is_array_v "
                   "is_base_of_v is_const_v is_constructible_v is_convertible_v is_copy_assignable_v is_empty_v is_floating_point_v is_integral_v "
                   "is_invocable_v is_lvalue_reference_v is_same_v is_signed_v is_trivially_copyable_v has_unique_object_representations_v is_unsigned_v is_void_v make_unsigned_t remove_const_t remove_cvref_t "
                   "remove_pointer_t remove_reference_t true_type type_identity type_identity_t void_t",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "as_const cmp_equal cmp_greater_equal cmp_less cmp_less_equal declval exchange forward in_place in_range index_sequence index_sequence_for "
               "integer_sequence make_index_sequence make_integer_sequence move pair swap",
    "variant": "get_if holds_alternative monostate variant",
    "vector": "erase_if vector",
}
# What the standard, or every implementation of it, has one header include of the others.
ALSO = {
    "algorithm": "utility", "array": "cstddef tuple utility", "charconv": "system_error",
    "condition_variable": "chrono mutex", "cstdio": "setvbuf cstddef", "cstdlib": "cstddef", "cstring": "cstddef",
    "map": "initializer_list utility", "memory": "cstddef utility", "mutex": "chrono",
    "optional": "type_traits utility", "span": "array cstddef iterator",
    "string": "cstddef initializer_list iterator string_view", "string_view": "cstddef iterator",
    "thread": "chrono", "tuple": "utility", "utility": "cstddef initializer_list type_traits",
    "vector": "cstddef initializer_list iterator",
}
HOME = {name: home for home, names in STANDARD.items() for name in names.split()}
INCLUDED = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)


@functools.cache
def reached_from(header):
    """All headers that come with this one."""
    reached = set()
    waiting = [header]
    while waiting:
        path = INCLUDE / (name := waiting.pop())
        for included in INCLUDED.findall(path.read_text()) if path.exists() else ALSO.get(name, "").split():
            if included not in reached:
                reached.add(included)
                waiting.append(included)
    return reached


def floor_of(header):
    """The floor of chorus/<folder>/..., or 7 for chorus/chorus.hpp, which may include everything."""
    parts = header.split("/")
    return FLOOR.get(parts[1], 0) if len(parts) > 2 else 7


def problems(header, text):
    lines = text.splitlines()
    if not lines or lines[0] != "#pragma once":
        yield "the first line is not '#pragma once'"
    if len(lines) < 2 or not lines[1].startswith("/// "):
        yield "no '/// ' comment in line 2 says what the header is"
    if floor_of(header) == 0:
        yield "its folder is on no floor"
    macros = set()
    for number, line in enumerate(lines, 1):
        if line != line.rstrip() or "\t" in line:
            yield f"line {number} has a tab or trailing space"
        if len(line) > 120:
            yield f"line {number} has {len(line)} columns, more than 120"
        if match := re.match(r"\s*#\s*include\s*(\S+)", line):
            included = match[1].strip('<>"')
            if match[1].startswith('"'):
                yield f"line {number} includes {match[1]}: write <chorus/...>"
            elif included.startswith("chorus/"):
                if not (INCLUDE / included).exists():
                    yield f"line {number} includes {included}, which does not exist"
                elif floor_of(included) > floor_of(header):
                    yield f"line {number} includes {included}, which is a floor above"
        if match := re.match(r"\s*#\s*define\s+(\w+)", line):
            macros.add(match[1])
        if match := re.match(r"\s*#\s*undef\s+(\w+)", line):
            macros.discard(match[1])
    reached = reached_from(header)
    for name in sorted(set(re.findall(r"\bstd::(\w+)", re.sub(r"//.*", "", text)))):
        if name not in HOME:
            yield f"uses std::{name}: say in {pathlib.Path(__file__).name} which header it comes from"
        elif HOME[name] not in reached:
            yield f"uses std::{name} without <{HOME[name]}>"
    asks = re.search(r"^#if.*CHORUS_(COMPILED|DEFINES_\w+)", text, re.MULTILINE)
    if asks and header != "chorus/core/config.hpp":
        before = [name for name in INCLUDED.findall(text[:asks.start()]) if name.startswith("chorus/")]
        if not any("chorus/core/config.hpp" in {name} | reached_from(name) for name in before):
            yield f"asks for {asks[0].split()[-1]} without <chorus/core/config.hpp>, where nobody has said that yet"
    for macro in sorted(macros):
        if not KEPT.fullmatch(macro):
            yield f"macro {macro} is neither CHORUS_... nor undefined at the end"


# Headers that <chorus/all.hpp> need not bring: what bodies of functions alone use, what needs a library of its own, and
# tests, which a program would only wait for.
INNER = re.compile(r"chorus/(compiled/|testing/|core/check_output|trace/merge_traces|comm/(engine|meeting|store|transport)/|comm/(mpi|gloo|nccl|staged)|parallel/ddp/gpu_rank|"
                   r"quantization/layer_output|launch/(console|variables|job|job_of_machines|machines|rank_output|rank_process|replacements|signal_pipe|stand_by"
                   r"|supervised_rank|supervisor|supervisor_link|world_from_environment)\.hpp)|/cuda[/.]|_impl\.hpp$|\.cuh$")


def left_out_of_all(headers):
    """Headers for programs that <chorus/all.hpp> lacks, where functions' bodies are in the library."""
    reached, waiting = {"chorus/all.hpp"}, ["chorus/all.hpp"]
    while waiting:
        for included in INCLUDED.findall((INCLUDE / waiting.pop()).read_text()):
            if re.match(r"chorus/(?!compiled/).*(?<!_impl)\.hpp$", included) and included not in reached:
                reached.add(included)
                waiting.append(included)
    return [header for header in headers if header not in reached and not INNER.search(header)]


def main():
    failed = 0
    headers = sorted(path for suffix in ("*.hpp", "*.cuh") for path in INCLUDE.rglob(suffix))
    for path in headers:
        header = path.relative_to(INCLUDE).as_posix()
        for problem in problems(header, path.read_text()):
            print(f"{header}: {problem}")
            failed += 1
    for header in left_out_of_all(path.relative_to(INCLUDE).as_posix() for path in headers):
        print(f"{header}: <chorus/all.hpp> does not bring it: include it there, or name it in INNER")
        failed += 1
    precompiled = set(INCLUDED.findall((ROOT / "tests/structure/standard.hpp").read_text()))
    for home in sorted(precompiled ^ set(STANDARD)):
        print(f"<{home}> stands in only one of standard.hpp and the table STANDARD: what it gives would go unchecked")
        failed += 1
    print(f"{len(headers)} headers, {failed} problems")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
