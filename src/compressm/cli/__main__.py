"""`python -m compressm.cli` is the same as `compressm`."""

from compressm.cli import main

main()
