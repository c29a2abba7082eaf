"""Messages for the user at the terminal, from code that has no console object.

    announcements.info("rollout server %s joined", url)

A run's console shows them, whichever rank they come from
(`megaverl.monitoring.console`). In a program that configures logging, they are records
of the logger "megaverl.announcements".
"""

from __future__ import annotations

import logging

announcements = logging.getLogger("megaverl.announcements")
