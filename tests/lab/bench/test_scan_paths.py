from compressm_lab.bench.scans import measure_paths


def test_every_path_is_timed_and_the_choice_is_named():
    wide = (1, 8, 2, 65)
    narrow, broad = measure_paths([(2, 16, 3, 2), wide], repeats=1).rows
    assert all(float(narrow[name]) > 0 for name in ("scan_s", "chunked_s", "convolution_s"))
    assert narrow["chosen"] in {"SCAN", "CHUNKED", "CONVOLUTION"}
    assert "convolution_s" not in broad
