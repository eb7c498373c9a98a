// Empty: a file may include it for editors; NVRTC and the emulator declare what it declares.
#pragma once
