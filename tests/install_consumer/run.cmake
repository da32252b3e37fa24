# Installs the build to a new prefix, then builds and runs the program in SOURCE against it as a user would.
set(work ${BUILD_DIRECTORY}/install_${PROGRAM})
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIRECTORY} --config ${CONFIG} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -G ${GENERATOR}
    -D CMAKE_BUILD_TYPE=${CONFIG}
    -D CMAKE_CXX_COMPILER=${CXX_COMPILER}
    -D CMAKE_PREFIX_PATH=${prefix}
    -D CMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)
run(${CMAKE_COMMAND} --build ${work}/build --config ${CONFIG})
run(${work}/build/${PROGRAM})
