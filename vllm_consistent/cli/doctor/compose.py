"""Which file CONFIG names: a recipe, or a configuration that the package ships."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from consistent_kernels.errors import invalid

_SHIPPED = "train_bridge.verl.config"


def shipped() -> dict[str, Path]:
    """Return the configurations that main_ppo finds by `--config-name`."""
    folder = Path(str(resources.files(_SHIPPED)))
    # Others are parts: only a primary configuration may set Hydra's search path.
    return {
        path.stem: path for path in sorted(folder.glob("*.yaml")) if "\nhydra:" in path.read_text()
    }


def locate(config: str) -> Path:
    """Return the .yaml file that CONFIG names: a file, a recipe's folder, or a shipped name.

    Raises:
        InvalidInputError: there is none.
    """
    path = Path(config).expanduser()
    file = path / f"{path.resolve().name}.yaml" if path.is_dir() else path
    if file.suffix in (".yaml", ".yml") and file.is_file():
        return file.resolve()
    if config in shipped():
        return shipped()[config]
    raise invalid(
        "doctor",
        "CONFIG",
        f"a recipe's folder, a .yaml file, or one of {list(shipped())}",
        repr(config),
    )
