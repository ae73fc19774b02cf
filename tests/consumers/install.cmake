# Installs the build tree BUILD and moves the result to WORK/installed.
file(REMOVE_RECURSE ${WORK}/before ${WORK}/installed)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/before
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${WORK}/before ${WORK}/installed)
