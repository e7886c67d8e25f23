"""Colours of all pictures: told apart also in grey and by colour-blind eyes."""

from __future__ import annotations

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7F7F7F"
INK, PAPER, SKY, BROWN = "#1F2328", "#FFFFFF", "#56B4E9", "#8C5A2B"
# Viridis from 0 to 0.8 in eight shades: told apart in grey, none too pale for white paper.
RAMP = ("#440154", "#482576", "#414487", "#35608D", "#2A788E", "#21908D", "#22A884", "#43BF71")


def shades(count: int) -> list[str]:
    """Colours of the ramp for `count` things in order, as far apart as it goes."""
    return [RAMP[round(k * (len(RAMP) - 1) / max(count - 1, 1))] for k in range(count)]
