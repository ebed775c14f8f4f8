#!/usr/bin/env bash
# image.sh OUT NAME[=LAYER]... writes one docker-archive with the named test images
# and prints "REFERENCE CONFIG-DIGEST" for each. Every engine's load takes it, and
# the digest is the image's ID in all of them. LAYER is a tar with the image's whole
# root file system, in busybox's place.
#
# The same static busybox gives the same bytes on every run and for every user:
# names are sorted, times are zero, owners are 0:0. Needs no root, no engine and
# no registry.
#
# Names:
#   hello   busybox and nothing else
#   env     ENV that would steer a Go or dynamically linked PID 1, and LABELs
#   volume  VOLUME /data
#   user    USER 1234
#   health  HEALTHCHECK that touches /health
#   clients, chromium
#           network clients as Debian ships them; they need a LAYER
#   agent   agents and what they run; needs a LAYER
set -euo pipefail
umask 022
export LC_ALL=C

die() {
	printf 'image.sh: %s\n' "$1" >&2
	[ $# -lt 2 ] || printf 'image.sh: hint: %s\n' "$2" >&2
	exit 1
}

# static_busybox prints the path of a busybox that runs without any library: in
# an image that holds nothing else, only a static one starts.
static_busybox() {
	local hint='install busybox-static (Debian) or busybox (Fedora)' found
	found=$(command -v busybox) || die 'no busybox on PATH' "$hint"
	found=$(readlink -f "$found")
	# ldd lists a dynamic program's libraries or at least its loader, ld-….so.
	if ldd "$found" 2>&1 | grep -qE '=>|/ld'; then
		die "$found is not statically linked" "$hint"
	fi
	printf '%s\n' "$found"
}

# go_arch prints the machine's architecture by the image specification's name.
go_arch() {
	case $(uname -m) in
	x86_64) echo amd64 ;;
	aarch64) echo arm64 ;;
	armv7l) echo arm ;;
	i?86) echo 386 ;;
	ppc64le | riscv64 | s390x) uname -m ;;
	*) die "no image architecture is known for $(uname -m)" ;;
	esac
}

# image_config prints the "config" object of an image.
image_config() {
	case $1 in
	hello) echo '{"Cmd":["sh"],"Env":["PATH=/bin:/usr/bin"]}' ;;
	env)
		echo '{"Cmd":["sh"],"Env":["PATH=/bin:/usr/bin","FOO=bar","GODEBUG=gctrace=1","GOGC=1","LD_PRELOAD=/image-preload.so"],"Labels":{"agentshim.run":"image","org.example.note":"from the image"}}'
		;;
	volume) echo '{"Cmd":["sh"],"Env":["PATH=/bin:/usr/bin"],"Volumes":{"/data":{}}}' ;;
	user) echo '{"Cmd":["sh"],"Env":["PATH=/bin:/usr/bin"],"User":"1234"}' ;;
	health)
		echo '{"Cmd":["sh"],"Env":["PATH=/bin:/usr/bin"],"Healthcheck":{"Test":["CMD","touch","/health"],"Interval":1000000000,"Timeout":1000000000,"Retries":1}}'
		;;
	clients | chromium | agent) echo '{"Cmd":["sh"],"Env":["PATH=/usr/local/bin:/usr/bin:/bin"]}' ;;
	*) die "image $1 is not known" 'the names are: hello env volume user health clients chromium agent' ;;
	esac
}

# pack writes the folder $1 as a reproducible tar to $2.
pack() {
	tar --create --file "$2" --directory "$1" --format=ustar --sort=name \
		--mtime=@0 --owner=0 --group=0 --numeric-owner .
}

digest() { sha256sum "$1" | cut -d' ' -f1; }

# make_root fills $1 with the root file system.
make_root() {
	local root=$1 busybox applet
	mkdir -p "$root"/{bin,dev,etc,home,proc,root,run,sys,tmp,usr/bin,var}
	chmod 0700 "$root/root"
	chmod 1777 "$root/tmp"
	busybox=$(static_busybox)
	install -m 0755 "$busybox" "$root/bin/busybox"
	for applet in $("$busybox" --list); do
		# The list names busybox itself: a link there would replace the program.
		[ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
	done
	ln -s ../../bin/env "$root/usr/bin/env"
	echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
	echo 'root:x:0:' >"$root/etc/group"
}

[ $# -ge 2 ] || die 'usage: image.sh OUT NAME[=LAYER]...'
out=$1
shift

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/archive"

make_root "$work/root"
pack "$work/root" "$work/busybox.tar"
arch=$(go_arch)

entries=
for wanted in "$@"; do
	name=${wanted%%=*}
	config=$(image_config "$name")
	tar=$work/busybox.tar
	[ "$name" = "$wanted" ] || tar=$(realpath "${wanted#*=}")
	layer=$(digest "$tar")
	ln -f "$tar" "$work/archive/$layer.tar" 2>/dev/null || cp "$tar" "$work/archive/$layer.tar"
	printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created":"1970-01-01T00:00:00Z","created_by":"integration/image.sh"}]}' \
		"$arch" "$config" "$layer" >"$work/config.json"
	id=$(digest "$work/config.json")
	mv "$work/config.json" "$work/archive/$id.json"
	entries+="${entries:+,}{\"Config\":\"$id.json\",\"RepoTags\":[\"agentshim/$name:test\"],\"Layers\":[\"$layer.tar\"]}"
	printf 'agentshim/%s:test %s\n' "$name" "$id"
done
printf '[%s]\n' "$entries" >"$work/archive/manifest.json"
pack "$work/archive" "$work/out.tar"
mv "$work/out.tar" "$out"
