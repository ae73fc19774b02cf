# Writes the files of the page as arrays of bytes: cmake -D FOLDER=... -D OUTPUT=... -P embed.cmake
set(text "// Made of examples/page/ by embed.cmake.\n#pragma once\n#include <string_view>\n\nnamespace page {\n\n")
foreach(name html css js)
  file(READ ${FOLDER}/page.${name} bytes HEX)
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  # The last byte is no part of it: an array of none would be no C++.
  string(APPEND text "inline constexpr char ${name}_bytes[] = {\n${bytes}0};\n"
    "inline constexpr std::string_view ${name}(${name}_bytes, sizeof ${name}_bytes - 1);\n\n")
endforeach()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "${text}}  // namespace page\n" @ONLY)
