// cuda_on_cpu.h, float16 and bfloat16: what the programs of shipped files begin with where it is precompiled.
#pragma once
#include "cuda_on_cpu.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"
