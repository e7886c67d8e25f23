"""Tiny files in the formats of the real ones."""

import csv
import gzip
import io
import pickle
import tarfile

import numpy as np
from PIL import Image


def write_idx(path, values):
    """A NumPy array of bytes; compressed where the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    data = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder, *, train=40, test=10, end=""):
    random = np.random.default_rng(0)
    for stem, count in (("train", train), ("t10k", test)):
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", random.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", np.arange(count) % 10)


def cifar_batches(count):
    """Name, pixels and labels of each of the six files."""
    random = np.random.default_rng(1)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        yield name, random.integers(0, 256, (count, 3072), np.uint8), [(7 * k) % 10 for k in range(count)]


def write_cifar_binary(folder, count):
    folder.mkdir(parents=True)
    for name, pixels, labels in cifar_batches(count):
        records = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_cifar_pickles(folder, count):
    folder.mkdir(parents=True)
    for name, pixels, labels in cifar_batches(count):
        batch = {b"batch_label": name.encode(), b"labels": labels, b"data": pixels, b"filenames": [b"x.png"] * count}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def write_imdb(folder, count):
    for part in ("train", "test"):
        for tone in ("pos", "neg"):
            (folder / part / tone).mkdir(parents=True)
            for k in range(count):
                (folder / part / tone / f"{k}_{8 if tone == 'pos' else 2}.txt").write_text(
                    f"{part} {tone} {k}: très bien " * (k + 1), encoding="utf8"
                )
    (folder / "train" / "unsup").mkdir()
    (folder / "train" / "unsup" / "0_0.txt").write_text("no label")


def write_archive(path, folder, name):
    """A .tar.gz with a folder in it, as it is published."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, name)


def write_tsv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, delimiter="\t").writerows(rows)
    path.write_text(text.getvalue(), encoding="utf8")


def write_listops(folder, rows=(("( ( ( [MAX 3 ) 9 ) ] )", 9), ("( ( ( ( [SM 8 ) 7 ) ( ( [MIN 4 ) ] ) ) ] )", 9))):
    for stem in ("train", "val", "test"):
        write_tsv(folder / f"basic_{stem}.tsv", [("Source", "Target"), *rows])


def write_aan(folder, rows=(("1.0", "A", "B", 'a "quoted"\ttext', "second"), ("0", "C", "D", "x" * 50, "é"))):
    for stem in ("train", "eval", "test"):
        write_tsv(folder / f"new_aan_pairs.{stem}.tsv", rows)


def write_pathfinder(folder, *, side=32, images=20):
    """`folder` is pathfinder32/curv_contour_length_14."""
    random = np.random.default_rng(2)
    for number in range(2):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        (folder / "metadata").mkdir(exist_ok=True)
        lines = []
        for k in range(images // 2):
            picture = Image.fromarray(random.integers(0, 256, (side, side), np.uint8))
            picture.save(folder / "imgs" / str(number) / f"sample_{k}.png")
            lines.append(f"imgs/{number} sample_{k}.png {k} {k % 2} 1.0 14 4 5 2 0.5 1")
        (folder / "metadata" / f"{number}.npy").write_text("\n".join(lines) + "\n")
