// A substitute for NVRTC that needs its builtins: tests/emulator/test_ptx_nvrtc.py.
#include <dlfcn.h>
#define TEXT(name, text) \
    int nvrtcGet##name##Size(void*, unsigned long* size) { *size = sizeof text; return 0; } \
    int nvrtcGet##name(void*, char* to) { __builtin_memcpy(to, text, sizeof text); return 0; }
extern "C" {
TEXT(PTX, "// tools, release 0, V" VERSION) TEXT(ProgramLog, "no builtins of " VERSION)
int nvrtcCreateProgram() { return 0; } int nvrtcDestroyProgram() { return 0; }
int nvrtcCompileProgram() { return dlopen(VERSION, RTLD_NOW | RTLD_NOLOAD) ? 0 : 7; }
const char* nvrtcGetErrorString(int status) { return status ? "FAILURE" : "NVRTC_SUCCESS"; }
}
