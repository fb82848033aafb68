# Device-code includes that hold wherever the operator package is installed.
#
# A wrapper is compiled again on the serving host (static kernels), where the source tree of the build is gone. So
#   1. headers from outside the package are staged here and travel with it, below ascendc/common;
#   2. every absolute include path in the operators' compile options becomes a mark, which the wrapper generator
#      (scripts/util/strata_relocatable.py) writes as a path relative to the wrapper or to the toolkit in use;
#   3. an absolute include path that is neither stops the configuration.
# Host code keeps its absolute include: it is compiled once, in place.
include_guard(GLOBAL)

set(STRATA_SHIPPED "__STRATA_SHIPPED__")
set(STRATA_TOOLKIT "__STRATA_TOOLKIT__")
set(STRATA_SHIPPED_DIR "${CMAKE_CURRENT_BINARY_DIR}/strata_shipped")

# what ships: <path in csrc> | <path below ascendc/common>
set(_STRATA_SHIPS
    "common/include/cann_compat.h|cann_compat.h"
    "third_party/catlass/include|catlass/include"
    "third_party/catlass/LICENSE|catlass/LICENSE"
    "moe/common|moe/common"
)

get_filename_component(_STRATA_CSRC "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
get_filename_component(_STRATA_CSRC_REAL "${_STRATA_CSRC}" REALPATH)

if(NOT EXISTS "${_STRATA_CSRC}/third_party/catlass/include/catlass/catlass.hpp")
    message(FATAL_ERROR "catlass is missing: ${_STRATA_CSRC}/third_party/catlass/include. "
        "Operators need its headers, and the package ships them; put the release's catlass commit there.")
endif()

file(REMOVE_RECURSE "${STRATA_SHIPPED_DIR}")
foreach(_ship IN LISTS _STRATA_SHIPS)
    string(REPLACE "|" ";" _pair "${_ship}")
    list(GET _pair 0 _from)
    list(GET _pair 1 _to)
    get_filename_component(_into "${STRATA_SHIPPED_DIR}/${_to}" DIRECTORY)
    if(EXISTS "${_STRATA_CSRC}/${_from}")
        file(COPY "${_STRATA_CSRC}/${_from}" DESTINATION "${_into}")
    endif()
endforeach()

# strata_relocate(<list>): replace the absolute include paths in the named list of compile options by marks.
function(strata_relocate LIST_NAME)
    set(_result)
    foreach(_option IN LISTS ${LIST_NAME})
        if(_option MATCHES "^(-I|-isystem|-iquote|-include|-imacros|)(/.*)$")
            set(_flag "${CMAKE_MATCH_1}")
            set(_path "${CMAKE_MATCH_2}")
            set(_new "")
            foreach(_ship IN LISTS _STRATA_SHIPS)
                string(REPLACE "|" ";" _pair "${_ship}")
                list(GET _pair 0 _from)
                list(GET _pair 1 _to)
                foreach(_root "${_STRATA_CSRC}/${_from}" "${_STRATA_CSRC_REAL}/${_from}")
                    _strata_below("${_path}" "${_root}" "${STRATA_SHIPPED}/${_to}" _new)
                endforeach()
            endforeach()
            foreach(_root "${ASCEND_CANN_PACKAGE_PATH}" "$ENV{ASCEND_HOME_PATH}")
                if(_root)
                    _strata_below("${_path}" "${_root}" "${STRATA_TOOLKIT}" _new)
                endif()
            endforeach()
            if(NOT _new)
                message(FATAL_ERROR "compile option ${_option} names a path of this build host that does not travel with "
                    "the package. Ship it: add it to _STRATA_SHIPS in ${CMAKE_CURRENT_FUNCTION_LIST_FILE}")
            endif()
            list(APPEND _result "${_flag}${_new}")
        else()
            list(APPEND _result "${_option}")
        endif()
    endforeach()
    set(${LIST_NAME} "${_result}" PARENT_SCOPE)
endfunction()

# _strata_below(<path> <root> <mark> <variable>): if path is root or lies below it, set variable to mark + the rest.
function(_strata_below PATH_NAME ROOT MARK VARIABLE)
    string(FIND "${PATH_NAME}/" "${ROOT}/" _position)
    if(_position EQUAL 0 AND NOT ${VARIABLE})
        string(LENGTH "${ROOT}" _length)
        string(SUBSTRING "${PATH_NAME}" ${_length} -1 _rest)
        set(${VARIABLE} "${MARK}${_rest}" PARENT_SCOPE)
    endif()
endfunction()
