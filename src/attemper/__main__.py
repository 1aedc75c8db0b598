"""``python -m attemper`` is the command ``attemper``."""

from attemper.cli import program

if __name__ == "__main__":
    program()
