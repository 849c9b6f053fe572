#!/usr/bin/env bash
# Every `nobounce` command in the code blocks of README.md and docs/guide/, as far as it can run here: measurements are
# only planned (--explain), programs that need a peer are replaced by `true`.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
build
python3 - "$nobounce" "$folder" <<'PY'
import glob, os, re, shlex, subprocess, sys

nobounce, folder = os.path.abspath(sys.argv[1]), sys.argv[2]
ran, failed, skipped = 0, [], 0


def commands():
    for page in ["README.md", *sorted(glob.glob("docs/guide/*.md"))]:
        inside = False
        for line in open(page, encoding="utf-8"):
            if line.lstrip().startswith("```"):
                inside = not inside
            elif inside and (found := re.match(r"(?:\$ )?(?:target/release/)?(nobounce\s.*)", line)):
                yield page, re.split(r"\s{2,}#|\s#\s", found.group(1))[0].strip()


def words_to_run(words):
    """The command as it can run here, and the exit codes that are right; None to skip it."""
    command = words[1] if len(words) > 1 else ""
    if command == "run" and "--" in words:
        options = ["lo" if word == "eth0" else word for word in words[2:words.index("--")]]
        return [command, *options, "--quiet", "--", "true"], (0,)
    if command == "bench":
        if {"--listen", "--peer", "--calibration", "--compare", "--device", "--explain-device"} & set(words):
            return None
        return [*(word for word in words[1:] if word != "--explain"), "--explain"], (0,)
    if command in ("predict", "topo", "doctor"):
        needs_files = any(word.endswith((".json", ".log")) or word in ("FILE", "DIR") for word in words)
        words = [os.path.abspath("README.md") if word.startswith("/data/") else word for word in words]
        if "--" in words:
            words = [*words[:words.index("--") + 1], "true"]
        return None if needs_files or "--serve" in words or "--peer" in words else (words[1:], (0, 1))
    return None


seen = set()
for page, line in commands():
    try:
        words = shlex.split(line)
    except ValueError:
        words = []
    chosen = words_to_run(words) if words else None
    if line in seen:
        continue
    seen.add(line)
    if chosen is None or "..." in line or line.endswith("\\"):
        skipped += 1
        continue
    arguments, codes = chosen
    done = subprocess.run([nobounce, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    ran += 1
    if done.returncode not in codes:
        failed.append(f"{page}: {line}\n  exit code {done.returncode}: {done.stderr.strip()[-400:]}")
print("\n".join(failed))
print(f"{ran} commands of the documentation run, {skipped} need files, peers or a GPU, {len(failed)} failed")
sys.exit(1 if failed or ran < 20 else 0)
PY
