// The parameter struct of a kernel, declared once for the kernel and for the host that fills it.
//
//   ONEPASS_PARAMETERS(DirectParameters) {
//     ONEPASS_WORD(const void*, input);
//     ONEPASS_WORD(int64, batch);
//   };
//
// In a kernel it is a plain struct of eight-byte members. On the host, which includes
// cuda/runtime/parameters.h before, each member takes an address, a Number or a double and knows its name. A
// struct with ONEPASS_WORDS, one for each parameter of the block, is declared by ONEPASS_COUNTED_PARAMETERS:
// in a kernel it is a template of their count.
#pragma once

#if defined(__CUDACC__)
#include "device/types.cuh"
#define ONEPASS_PARAMETERS(Name) struct Name
#define ONEPASS_COUNTED_PARAMETERS(Name) \
  template <int Count>                   \
  struct Name
#define ONEPASS_WORD(Type, name) Type name
#define ONEPASS_WORDS(Type, name) Type name[Count > 0 ? Count : 1]
#else
#define ONEPASS_PARAMETERS(Name) struct Name : cuda::Parameters
#define ONEPASS_COUNTED_PARAMETERS(Name) struct Name : cuda::Parameters
#define ONEPASS_WORD(Type, name) \
  cuda::Word name { *this, #name }
#define ONEPASS_WORDS(Type, name) \
  cuda::WordList name { *this, #name }
#endif
