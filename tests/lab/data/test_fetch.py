"""Against a server of our own: nothing here needs a network."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from compressm_lab.data import DataError, Store
from compressm_lab.data.files import ROOT_VARIABLE, Remote, Wanted, default_root

CONTENT = bytes(range(256)) * 4000  # a megabyte
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(ThreadingHTTPServer):
    """Serves CONTENT; cuts the first `cuts` answers short after `after` bytes."""

    daemon_threads = True

    def __init__(self, *, cuts=0, after=1 << 18, ranges=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts, self.after, self.ranges, self.asked = cuts, after, ranges, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/some.bin"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range") if self.server.ranges else None
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        if self.server.cuts:
            self.server.cuts -= 1
            self.wfile.write(CONTENT[start : start + self.server.after])
            return
        self.wfile.write(CONTENT[start:])

    def log_message(self, *_):
        pass


def wanted(server, checksum=MD5):
    return Wanted(("elsewhere/some.bin", "here/some.bin"), Remote(server.url, checksum))


def test_a_file_is_fetched_once_and_then_found(tmp_path):
    shown = []
    with Server() as server:
        store = Store(tmp_path, progress=lambda *progress: shown.append(progress))
        path = store.get(wanted(server))
        assert path == tmp_path / "here" / "some.bin"
        assert path.read_bytes() == CONTENT
        assert store.get(wanted(server)) == path
        assert server.asked == [None]
    assert shown[-1] == ("some.bin", len(CONTENT), len(CONTENT))


def test_a_cut_connection_goes_on_where_it_broke(tmp_path):
    with Server(cuts=2) as server:
        assert Store(tmp_path).get(wanted(server)).read_bytes() == CONTENT
        assert server.asked == [None, "bytes=262144-", "bytes=524288-"]


def test_what_came_is_kept_for_the_next_call(tmp_path):
    with Server(cuts=3) as server:
        with pytest.raises(DataError, match=r"some\.bin is not in .*did not give it"):
            Store(tmp_path).get(wanted(server))
        assert not (tmp_path / "here" / "some.bin").exists()
        assert Store(tmp_path).get(wanted(server)).read_bytes() == CONTENT
        assert server.asked[-1] == "bytes=786432-"
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["some.bin"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_of_something_else_is_not_trusted(tmp_path, ranges):
    (tmp_path / "here").mkdir()
    part = tmp_path / "here" / "some.bin.part"
    part.write_bytes(b"x" * (len(CONTENT) + 1 if ranges else 10))
    with Server(ranges=ranges) as server:
        assert Store(tmp_path).get(wanted(server)).read_bytes() == CONTENT


def test_another_checksum_is_refused_by_name(tmp_path):
    with Server() as server, pytest.raises(DataError, match=r"some\.bin from http.* is not the official file"):
        Store(tmp_path).get(wanted(server, "md5:" + "0" * 32))
    assert list((tmp_path / "here").iterdir()) == []


def test_offline_says_where_a_file_belongs(tmp_path):
    missing = Wanted(("a", "b/c"), Remote("http://nowhere.invalid/c", MD5))
    with pytest.raises(DataError, match=r"b/c is not in .*nothing is fetched offline; put http://nowhere.invalid/c at"):
        Store(tmp_path, offline=True).get(missing)


def test_without_a_network_the_address_is_in_the_message(tmp_path):
    with Server() as server:
        gone = wanted(server)
    with pytest.raises(DataError, match=f"did not give it.*{ROOT_VARIABLE}"):
        Store(tmp_path).get(gone)


def test_the_root_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    assert default_root() == Store().root == tmp_path
    monkeypatch.delenv(ROOT_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "compressm" in default_root().name
    assert Store(Path("~/x")).root == tmp_path / "x"
