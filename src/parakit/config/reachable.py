"""Ask whether an address on the network answers. This module runs on every Python from 3.6 on, like `settings.py`."""

import urllib.error
import urllib.request

SECONDS = 8.0
"""Time after which an address is taken for unreachable."""


def explain_unreachable(address: str) -> str:
    """Return the reason why an address does not answer.

    The result is empty if the address answers. An HTTP error is an answer too.
    """
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)
