"""What `compressm bench NAME` measures."""
