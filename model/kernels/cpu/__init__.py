"""C++ kernels for the CPU, and their callers."""
