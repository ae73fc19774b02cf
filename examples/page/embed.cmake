# Writes the page's files as byte arrays: cmake -D FOLDER=... -D OUTPUT=... -P embed.cmake
# Scripts are concatenated in the order of their names.
set(text "// Made of examples/page/ by embed.cmake.\n#pragma once\n#include <string_view>\n\nnamespace page {\n\n")
foreach(name html css js)
  file(GLOB parts ${FOLDER}/page*.${name})
  list(SORT parts)
  set(bytes "")
  foreach(part IN LISTS parts)
    file(READ ${part} read HEX)
    string(APPEND bytes ${read})
  endforeach()
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  # The final 0 is not part of the file: C++ has no empty arrays.
  string(APPEND text "inline constexpr char ${name}_bytes[] = {\n${bytes}0};\n"
    "inline constexpr std::string_view ${name}(${name}_bytes, sizeof ${name}_bytes - 1);\n\n")
endforeach()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "${text}}  // namespace page\n" @ONLY)
