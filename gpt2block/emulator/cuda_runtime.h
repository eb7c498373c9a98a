// Empty: a kernel file may include cuda_runtime.h for editors; NVRTC and the emulator need no include for its contents.
#pragma once
