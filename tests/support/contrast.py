"""Contrast of two colours by the formula of WCAG 2: 1 (the same) to 21 (black on white)."""

from __future__ import annotations

Colour = tuple[int, int, int]


def luminance(colour: Colour) -> float:
    """Relative luminance of red, green and blue from 0 to 255."""
    shares = [channel / 255 for channel in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, two: Colour) -> float:
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def of_hex(text: str) -> Colour:
    """``#rrggbb``."""
    red, green, blue = (int(text[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue
