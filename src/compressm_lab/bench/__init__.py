"""The benchmarks behind `compressm bench NAME`."""
