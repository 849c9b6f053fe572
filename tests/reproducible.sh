#!/usr/bin/env bash
# Two clones of this repository in different folders give equal packages. Two release builds: `make test-reproducible` runs it. It is not
# executable, so that tools/test-scripts leaves it out. Changes that are not committed are not in the clones.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
unset CARGO_TARGET_DIR RUSTFLAGS SOURCE_DATE_EPOCH

packages() { # packages CLONE NAME: builds there, and leaves the packages in $folder/NAME
    git clone --quiet --shared . "$1" && make -C "$1" --no-print-directory package && mv "$1/target/package" "$folder/$2" && rm -rf "$1"
}

packages "$folder/a" first || { echo "the first build failed"; exit 1; }
(umask 077 && LC_ALL=C.UTF-8 TZ=Asia/Tokyo packages "$folder/another/deeper/folder" second) || { echo "the second build failed"; exit 1; }

if diff -r "$folder/first" "$folder/second"; then
    cat "$folder/first/SHA256SUMS"
    exit 0
fi
# Which of the files in the archives differ.
for side in first second; do
    mkdir "$folder/$side/unpacked"
    tar -xzf "$folder/$side"/nobounce-*.tar.gz -C "$folder/$side/unpacked"
done
diff -rq "$folder/first/unpacked" "$folder/second/unpacked"
if command -v diffoscope >/dev/null; then diffoscope --text - "$folder"/{first,second}/nobounce_*.deb | head -n 100; fi
exit 1
