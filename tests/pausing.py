"""A process that does nothing until it is killed, for tests of what ends it."""

import signal

signal.pause()
