"""The script that writes pages, for those of research."""

from tests.lab.conftest import script as script
