"""Alias of `ftcli.tasks.shared.batches`, its name in earlier versions. It remains for one release."""

from ftcli.tasks.shared.batches import *  # noqa: F403
