"""Small files of one's own in the layouts of known archives."""

import random


def write_ford(folder, *, train=48, test=16, length=40):
    """As FordA of the UCR archive: tabs, no header, the class first; class 1 oscillates faster."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("TRAIN", train, 0), ("TEST", test, 1)):
        draw, lines = random.Random(seed), []
        for number in range(count):
            label = (-1, 1)[number % 2]
            period = 12 if label < 0 else 5
            start = draw.randrange(period)
            wave = [(((t + start) % period) / period - 0.5) * 3 + draw.gauss(0, 0.2) for t in range(length)]
            lines.append("\t".join([str(label), *(f"{value:.6f}" for value in wave)]))
        (folder / f"FordA_{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_turbofan(folder, *, engines=12):
    """As FD001 of C-MAPSS: spaces, also at the end, no header; engine, cycle, 3 settings, 21 sensors; RUL in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("train", 0), ("test", 1)):
        draw, lines, left = random.Random(seed), [], []
        for engine in range(1, engines + 1):
            life = draw.randint(20, 40)
            seen = life if name == "train" else draw.randint(10, life - 3)
            left.append(life - seen)
            for cycle in range(1, seen + 1):
                sensors = [f"{600 + (life - cycle) * (k % 3) / 10 + draw.gauss(0, 0.1):.4f}" for k in range(20)]
                lines.append(
                    " ".join([str(engine), str(cycle), "0.0010", "-0.0003", "100.0", *sensors, "518.67"]) + "  "
                )
        (folder / f"{name}_FD001.txt").write_text("\n".join(lines) + "\n")
    (folder / "RUL_FD001.txt").write_text("\n".join(f"{one} " for one in left) + "\n")
    return folder


def write_long(path, rows, header="series,step,a,b,label", delimiter=","):
    """A table with one row a step; rows are tuples of cells."""
    lines = [header.replace(",", delimiter), *(delimiter.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def steps(series=8, length=3, labels=("no", "yes")):
    """Rows of series of different lengths: a counts the steps, b does not change within a series."""
    return [
        (f"s{one}", step, step + one / 10, one, labels[one % len(labels)])
        for one in range(series)
        for step in range(length + one % 3)
    ]
