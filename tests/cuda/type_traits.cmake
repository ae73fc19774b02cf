# nvcc 13 appends each instance of an alias that is a class's member to a list, to whose end it walks from the front.
# libstdc++ makes tuples, functions and much else of such an alias, std::__conditional<...>::type, and so that walk took a
# third of train_step_cuda's time to compile for the device, and more of unit_cuda's. Here nvcc gets a copy of
# <type_traits>, in which a template of its own stands for the alias. The device's code is the same to the byte.

find_file(type_traits type_traits PATHS ${CMAKE_CUDA_IMPLICIT_INCLUDE_DIRECTORIES} NO_DEFAULT_PATH NO_CACHE)
if(type_traits)
  file(READ ${type_traits} text)
  set(alias "  template<bool _Cond, typename _If, typename _Else>\n    using __conditional_t\n")
  set(value "typename __conditional<_Cond>::template type<_If, _Else>")
  string(FIND "${text}" "${alias}      = ${value};" found)
  if(NOT found EQUAL -1)  # another library, or another version of it, is read as it is
    string(REPLACE "${alias}      = ${value};" "
  template<bool, typename _If, typename> struct __chosen { using type = _If; };
  template<typename _If, typename _Else> struct __chosen<false, _If, _Else> { using type = _Else; };
${alias}      = typename __chosen<_Cond, _If, _Else>::type;" text "${text}")
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cuda_type_traits/type_traits CONTENT "${text}" @ONLY)
    target_include_directories(chorus_cuda_testing SYSTEM BEFORE INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:${CMAKE_CURRENT_BINARY_DIR}/cuda_type_traits>)
  endif()
endif()
