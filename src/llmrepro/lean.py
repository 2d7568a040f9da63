"""nbformat, imported without a grammar of addresses that costs its validator a second and no notebook needs."""

import sys

SPARED = "rfc3987_syntax"  # jsonschema does without it where it is not installed

if SPARED not in sys.modules:
    sys.modules[SPARED] = None
    try:
        import nbformat  # noqa: F401
    finally:
        del sys.modules[SPARED]
