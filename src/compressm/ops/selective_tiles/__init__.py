"""Parts of the kernels of selective scans."""
