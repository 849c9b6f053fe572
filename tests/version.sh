#!/usr/bin/env bash
# The text of `nobounce --version` (crates/cli/build.rs) in a checkout, in a worktree, with packed references, in a source archive, without
# git; and that what cargo watches changes with each commit.
set -uo pipefail
. "$(dirname "$0")/programs.bash"
need git git
: >"$folder/client"
rustc --edition 2024 -o "$folder/script" crates/cli/build.rs || { echo "crates/cli/build.rs could not be built"; exit 1; }

git() { command git -C "$repo" -c user.name=a -c user.email=a@b.c -c commit.gpgsign=false "$@" >/dev/null 2>&1; }
commit() { GIT_COMMITTER_DATE="$1T12:00:00Z" git commit --allow-empty -m "$1"; }
told() { # told FOLDER [VARIABLE=VALUE...]: what the script prints for the sources in the folder
    env -i PATH="$PATH" PROFILE=release CARGO_PKG_VERSION=0.1.0 CARGO_MANIFEST_DIR="$1/crates/cli" "${@:2}" "$folder/script" >"$folder/client" 2>&1
}
version_is() { # version_is PATTERN WHAT
    expect "^cargo::rustc-env=LONG_VERSION=$1\$" "$folder/client" "$2"
    passed=$((passed + 1))
}
watched() { # the state of what cargo watches; a missing path would mean a build each time
    local path
    sed -n 's/^cargo::rerun-if-changed=\(\/.*\)/\1/p' "$folder/client" | while read -r path; do
        [ -e "$path" ] || echo "missing: $path"
        find "$path" -type f -printf '%p %T@\n'
    done
}
changes() { # changes FOLDER DATE WHAT: a commit is noticed
    local before
    told "$1"
    before=$(watched)
    case $before in '' | *missing*) fail "$3: watched: $before" ;; esac
    commit "$2"
    [ "$(watched)" != "$before" ] || fail "$3: a commit changes nothing of what is watched"
    told "$1"
    version_is "0\.1\.0 \([0-9a-f]{12} $2\)" "$3"
}

repo=$folder/repo
mkdir -p "$repo/crates/cli"
git init
told "$repo"
version_is '0\.1\.0' "a repository without a commit"
commit 2000-02-28
changes "$repo" 2000-02-29 "a checkout"
git pack-refs --all
changes "$repo" 2024-12-31 "packed references"
git checkout --detach
changes "$repo" 2025-03-01 "a detached HEAD"
git worktree add -b other "$folder/worktree"
mkdir -p "$folder/worktree/crates/cli"
repo=$folder/worktree
changes "$repo" 2026-11-18 "a worktree"
told "$repo" SOURCE_DATE_EPOCH=951782400
version_is '0\.1\.0 \([0-9a-f]{12} 2000-02-29\)' "SOURCE_DATE_EPOCH"
told "$repo" NOBOUNCE_COMMIT=0123456789abcdef SOURCE_DATE_EPOCH=0
version_is '0\.1\.0 \(0123456789ab 1970-01-01\)' "NOBOUNCE_COMMIT"
told "$repo" NOBOUNCE_COMMIT=
version_is '0\.1\.0' "an empty NOBOUNCE_COMMIT"
told "$repo" PROFILE=debug
version_is '0\.1\.0 \(debug\)' "a debug build"
mkdir -p "$folder/path"
told "$repo" PATH="$folder/path"
version_is '0\.1\.0' "without git"
# Unpacked in the repository of another project.
mkdir -p "$repo/vendor/nobounce/crates/cli"
told "$repo/vendor/nobounce"
version_is '0\.1\.0' "a source archive"
! told "$repo" SOURCE_DATE_EPOCH=yesterday || fail "a wrong SOURCE_DATE_EPOCH is accepted"

done_all
