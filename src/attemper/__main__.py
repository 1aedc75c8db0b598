"""``python -m attemper`` is the command ``attemper``."""

from attemper.cli import main

if __name__ == "__main__":
    main()
