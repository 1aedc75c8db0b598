"""What tests of commands share."""

from tests.support.command import run as run
