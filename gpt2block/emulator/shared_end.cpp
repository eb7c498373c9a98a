#include "events.h"

__attribute__((noinit)) char shared_end[1];
