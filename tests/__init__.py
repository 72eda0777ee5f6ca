"""What every process of a test loads stays loaded: it looks for garbage in it seldom, or never."""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)  # Python would look once more as it ends
