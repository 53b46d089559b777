// Functions of newer system libraries that compiled host code refers to, so that a packaged library
// also runs with glibc 2.28 and with the libstdc++ of GCC 8. They are not exported.
#include <sys/single_threaded.h>

#include <new>
#include <sstream>
#include <string>

// glibc 2.32 has this variable. While it is false, reference counts change by atomic instructions.
char __libc_single_threaded = 0;

namespace std {

// libstdc++ has it since GCC 11 (GLIBCXX_3.4.29).
void __throw_bad_array_new_length() {
    throw bad_array_new_length();
}

}  // namespace std

namespace flashsmith {

// These two functions have the names and calling conventions of members of libstdc++, which C++
// cannot define outside of it. Each calls the older member that has the same effect.

// basic_ostringstream(), since GCC 9 (GLIBCXX_3.4.26).
void construct(std::ostringstream* stream) asm(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void construct(std::ostringstream* stream) {
    new (stream) std::ostringstream(std::ios_base::out);
}

// basic_stringbuf::str() const, which C++20 qualifies with & (GLIBCXX_3.4.29).
std::string older_text(const std::stringbuf* buffer) asm(
    "_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string text(const std::stringbuf* buffer) asm(
    "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string text(const std::stringbuf* buffer) {
    return older_text(buffer);
}

}  // namespace flashsmith
