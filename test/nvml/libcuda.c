// SPDX-License-Identifier: Apache-2.0

// A libcuda.so.1 for simulated driver roots: tools that make CDI specs look for the file by its version.
// It answers version questions and has no GPU to offer.

enum { CUDA_ERROR_NO_DEVICE = 100 };

int cuInit(unsigned flags)
{
	(void)flags;
	return CUDA_ERROR_NO_DEVICE;
}

int cuDriverGetVersion(int *version)
{
	*version = 12080;
	return 0;
}
