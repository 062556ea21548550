"""The persistent compilation cache: compiled steps survive the process."""

from pathlib import Path

import jax
import platformdirs

MIN_COMPILE_SECONDS = 0.3  # quicker ones are not worth a file


def enable_compile_cache(path: Path | None = None) -> None:
    """Keeps compiled programs in the user's cache directory, unless jax has been given a place already.

    A folder that cannot be written costs the cache and nothing else: jax then warns and goes on.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    path = path or Path(platformdirs.user_cache_dir("jaxinfer")) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
