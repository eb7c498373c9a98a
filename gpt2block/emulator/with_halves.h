// cuda_on_cpu.h, float16 and bfloat16: the precompiled header of programs for shipped files.
#pragma once
#include "cuda_on_cpu.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"
