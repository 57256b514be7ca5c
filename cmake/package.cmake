# SPDX-License-Identifier: Apache-2.0
# Installation: the commands, libreshard with its headers and backends, the library of models, and the files for CMake
# and pkg-config. All paths are relative, so the tree can be moved: a prefix, a .deb and the folder of the Python module
# have one layout.
set(CMAKE_INSTALL_LIBDIR lib CACHE PATH "folder of libraries") # the same layout on all systems
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(reshard SHARED $<TARGET_OBJECTS:reshard_executor> $<TARGET_OBJECTS:reshard_schema> $<TARGET_OBJECTS:reshard_kernels>
            $<TARGET_OBJECTS:reshard_rendezvous> $<TARGET_OBJECTS:reshard_base>)
set_target_properties(reshard PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS ${PROJECT_SOURCE_DIR}/executor/api/libreshard.map)
if(NOT RESHARD_PORTABLE) # a wheel has no symbolic links: it would contain the library three times
  set_target_properties(reshard PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
endif()
target_link_options(reshard PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/executor/api/libreshard.map)
target_link_libraries(reshard PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
target_include_directories(reshard INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# Backends may link libraries outside the loader's search path, such as an NCCL in the folder of a CUDA toolkit.
if(BACKENDS)
  if(NOT RESHARD_PORTABLE) # those folders exist on this machine only
    set_target_properties(${BACKENDS} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  endif()
  install(TARGETS ${BACKENDS} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
foreach(command ${COMMANDS})
  list(APPEND PROGRAMS reshard-${command})
endforeach()

if(RESHARD_PORTABLE)
  foreach(target reshard ${PROGRAMS} ${BACKENDS})
    target_sources(${target} PRIVATE cmake/arc4random.c)
    target_link_options(${target} PRIVATE -static-libstdc++) # not -static-libgcc: of GCC 12 that needs glibc 2.35
  endforeach()
  foreach(target ${BACKENDS}) # each has a C++ runtime of its own, which no other library of the process may use
    target_link_options(${target} PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/executor/api/libreshard.map)
  endforeach()
endif()

install(TARGETS ${PROGRAMS} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS reshard EXPORT reshard LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/reshard/reshard.h include/reshard/reshard_plan.h include/reshard/reshard.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/reshard)
# The folder keeps its structure: its files refer to each other by relative paths.
install(DIRECTORY examples/ DESTINATION ${CMAKE_INSTALL_DATADIR}/reshard)
install(FILES README.md docs/yaml.md docs/library.md docs/library-tables.md docs/worked-examples.md docs/api.md
        LICENSE NOTICE THIRD_PARTY_NOTICES.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CONFIG ${CMAKE_INSTALL_LIBDIR}/cmake/reshard)
install(EXPORT reshard NAMESPACE reshard:: DESTINATION ${CONFIG} FILE reshard-config.cmake)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/reshard-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/reshard-config-version.cmake DESTINATION ${CONFIG})

# ${pcfiledir} is a variable of pkg-config: the folder of the .pc file. The prefix is computed from it.
set(PKGCONFIG ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH UP /${PKGCONFIG} /)
string(REGEX REPLACE "/$" "" UP ${UP})
configure_file(cmake/reshard.pc.in ${PROJECT_BINARY_DIR}/reshard.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/reshard.pc DESTINATION ${PKGCONFIG})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "the reshard developers <reshard@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "compiler for weight movement, and the executor of its plans")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_STRIP_FILES ON)
include(CPack)
