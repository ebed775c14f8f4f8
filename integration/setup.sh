#!/usr/bin/env bash
# setup.sh COMMAND prepares a machine for agentshim's tests and its first run.
#
#   packages  install the Debian packages that are missing (root)
#   engines   start dockerd if no daemon answers, configure Podman, make the
#             users of the rootless and the docker-group set-up (root)
#   images    make the test images and load them into all stores (root)
#   all       packages, engines, images
#   hello     what `make run` needs: the engine that answers is used as it is
#             and gets the image agentshim/hello:test; where none answers, root
#             gets one installed and started
#   soak      all, and the image of a browser
#   bench     install the proxies that `make bench` compares with (root)
#   stop      end the dockerd that `engines` started, and no other
#
# Every command can be repeated, and is quick when there is nothing to do. Each
# wait has a bound. Progress goes to standard error; nothing reads standard input.
set -euo pipefail
umask 022
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
exec </dev/null

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

readonly docker_host=unix:///var/run/docker.sock
readonly dockerd_log=/var/log/agentshim-test-dockerd.log
readonly dockerd_pid=/run/agentshim-test-dockerd.pid
readonly setup_lock=/run/agentshim-test-setup.lock
readonly policy=/usr/sbin/policy-rc.d
readonly containers_conf=/etc/containers/containers.conf
readonly marker='# written by agentshim integration/setup.sh'

readonly rootless_user=agentshim-rootless
readonly docker_user=agentshim-docker

readonly all_packages=(
	docker.io podman runc crun uidmap slirp4netns passt fuse-overlayfs docker-registry
	iptables nftables busybox-static libseccomp-dev pkg-config gcc libc6-dev
	tmux strace make git mmdebstrap musl-tools
)
# What the images of real programs hold beside Debian's base system: NAME_packages are
# Debian's, NAME_npm are npm's. Debian's own npm is some hundred packages: npm comes as
# its own one, in the version for the image's Node.js.
readonly clients_packages=(
	ca-certificates curl wget git openssh-client python3-minimal libpython3-stdlib nodejs
)
readonly clients_npm=(npm@10.9.9)
# Agents as their users install them, and what they and their users run. The Go toolchain
# is mounted from the machine.
readonly agent_packages=(
	ca-certificates curl git ripgrep python3-minimal libpython3-stdlib gcc libc6-dev sqlite3 tmux
	openjdk-17-jre-headless bubblewrap busybox-static procps
)
agent_npm=(
	"node-linux-$(uname -m | sed 's/x86_64/x64/; s/aarch64/arm64/')@24.22.3" npm@11.21.2
	@anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33
	@google/gemini-cli@0.61.0 @qwen-code/qwen-code@0.24.4
)
readonly agent_npm
readonly chromium_packages=(ca-certificates chromium-headless-shell)
readonly chromium_npm=()
readonly image_cache=/var/cache/agentshim-test
readonly bench_packages=(tinyproxy-bin squid)
readonly hello_packages=(docker.io runc iptables busybox-static)
# The same needs as programs, for a system without dpkg.
readonly all_programs=(
	docker dockerd podman runc crun newuidmap slirp4netns pasta iptables nft busybox
	pkg-config gcc tmux strace make git mmdebstrap musl-gcc npm
)
readonly all_images=(hello env volume user health)

say() { printf 'setup: %s\n' "$*" >&2; }

# die MESSAGE [HINT]
die() {
	say "$1"
	[ $# -lt 2 ] || say "hint: $2"
	exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

need_root() {
	[ "$(id -u)" -eq 0 ] || die "$1 needs root" "run it as root: $2"
}

# slowly WHAT SECONDS COMMAND... runs COMMAND with that time limit, shows every
# ten seconds that it still runs, and its output only if it fails.
slowly() {
	local what=$1 limit=$2 log pid start=$SECONDS next=10 code=0
	shift 2
	log=$(mktemp)
	say "$what …"
	timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 &
	pid=$!
	trap 'kill "$pid" 2>/dev/null; wait "$pid"; exit 130' INT TERM
	while kill -0 "$pid" 2>/dev/null; do
		sleep 0.2
		if [ $((SECONDS - start)) -ge "$next" ]; then
			say "$what … $((SECONDS - start)) s"
			next=$((next + 10))
		fi
	done
	wait "$pid" || code=$?
	trap - INT TERM
	if [ "$code" -ne 0 ]; then
		tail -n 30 "$log" >&2
		rm -f "$log"
		[ "$code" -ne 124 ] || die "$what: not done after $limit s"
		die "$what: exit code $code"
	fi
	rm -f "$log"
}

# docker_local asks the local daemon, whatever the caller's context says.
docker_local() {
	env -u DOCKER_CONTEXT -u DOCKER_TLS_VERIFY DOCKER_HOST="$docker_host" \
		timeout 60 docker "$@"
}

docker_answers() { have docker && docker_local version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# --- packages ---------------------------------------------------------------

# hold_services keeps package scripts from starting services until
# release_services; what an interrupted run left is put back first.
hold_services() {
	release_services
	[ ! -e "$policy" ] || mv "$policy" "$policy.agentshim-saved"
	trap release_services EXIT
	printf '#!/bin/sh\n%s\nexit 101\n' "$marker" >"$policy"
	chmod 0755 "$policy"
}

release_services() {
	if [ -e "$policy" ] && grep -qxF "$marker" "$policy"; then rm -f "$policy"; fi
	[ ! -e "$policy.agentshim-saved" ] || mv "$policy.agentshim-saved" "$policy"
	trap - EXIT
}

missing_packages() {
	local name
	for name in "$@"; do
		[ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] ||
			printf '%s\n' "$name"
	done
}

# install_packages PACKAGE... installs what is missing and starts no service.
install_packages() {
	local missing
	mapfile -t missing < <(missing_packages "$@")
	[ ${#missing[@]} -gt 0 ] || return 0
	need_root "installing ${missing[*]}" 'integration/setup.sh packages'
	local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y
		-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2)
	slowly 'updating the package lists' 300 "${apt[@]}" update
	hold_services
	say "missing: ${missing[*]}"
	slowly "installing ${#missing[@]} packages" 1200 \
		"${apt[@]}" install --no-install-recommends "${missing[@]}"
	release_services
	# Tests and benchmark run servers of their own; the packaged services are never wanted.
	local service
	for service in docker-registry squid; do
		if [[ " ${missing[*]} " == *" $service "* ]]; then
			update-rc.d "$service" disable >/dev/null 2>&1 || true
		fi
	done
}

packages() {
	if have dpkg-query && have apt-get; then
		install_packages "${all_packages[@]}"
		return
	fi
	local name missing=()
	for name in "${all_programs[@]}"; do have "$name" || missing+=("$name"); done
	[ ${#missing[@]} -eq 0 ] ||
		die "not on PATH: ${missing[*]}" "install them with this system's package manager"
}

# --- engines ----------------------------------------------------------------

# drop_stale_pid removes the pid file $1 when its process is not the program $2:
# dockerd takes any live process of that number for its own predecessor.
drop_stale_pid() {
	local pid
	[ -e "$1" ] || return 0
	pid=$(<"$1")
	if [ "$(cat "/proc/${pid:-none}/comm" 2>/dev/null || true)" != "$2" ]; then rm -f "$1"; fi
}

# start_time prints the start of process $1 in clock ticks since boot, which with
# the number names a process for good (proc(5), field 22).
start_time() { sed -E 's/^.*\) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# launch_dockerd starts dockerd in a session of its own. It inherits no
# descriptor: a pipe held open would keep the reader of this script's output waiting.
launch_dockerd() (
	local fd
	exec >"$dockerd_log" 2>&1
	for fd in /proc/self/fd/*; do
		fd=${fd##*/}
		[ "$fd" -le 2 ] || eval "exec $fd>&-" 2>/dev/null || true
	done
	cd /
	setsid env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
		dockerd --host="$docker_host" &
	printf '%s %s\n' "$!" "$(start_time "$!")" >"$dockerd_pid"
)

start_dockerd() {
	local waited=0
	if docker_answers; then
		say 'docker: a daemon answers'
		return
	fi
	have dockerd || die 'dockerd is not installed' 'run integration/setup.sh packages'
	if [ -d /run/systemd/system ] && systemctl cat docker.service >/dev/null 2>&1; then
		slowly 'starting docker.service' 120 systemctl start docker.service
	elif [ ! -e /run/docker.pid ] || drop_stale_pid /run/docker.pid dockerd && [ ! -e /run/docker.pid ]; then
		drop_stale_pid /run/docker/containerd/containerd.pid containerd
		say "starting dockerd (log: $dockerd_log) …"
		launch_dockerd
	fi
	until docker_answers; do
		sleep 0.5
		waited=$((waited + 1))
		[ "$waited" -lt 120 ] ||
			die "no Docker daemon answers on $docker_host after 60 s" "read $dockerd_log"
	done
	say 'docker: the daemon answers'
}

# dockerd_running succeeds if the dockerd that launch_dockerd started still runs
# and sets pid to its number.
dockerd_running() {
	local start
	[ -e "$dockerd_pid" ] || return 1
	read -r pid start <"$dockerd_pid"
	[ -n "$start" ] && [ "$(start_time "$pid")" = "$start" ]
}

# stop ends the dockerd that launch_dockerd started, with its containers.
stop() {
	local pid waited=0
	if dockerd_running; then
		say "stopping dockerd (process $pid) …"
		kill "$pid"
		while dockerd_running; do
			sleep 0.5
			waited=$((waited + 1))
			[ "$waited" -lt 60 ] || die "dockerd (process $pid) did not end within 30 s"
		done
	fi
	rm -f "$dockerd_pid"
}

# podman_config prints the Podman settings this machine needs.
podman_config() {
	echo "$marker"
	echo '[containers]'
	# Podman asks for nofile 1048576 by default, which fails above the hard limit;
	# as root it lowers its own nproc to pid_max, which bounds its containers'.
	local files processes
	files=$(ulimit -Hn)
	[ "$files" != unlimited ] || files=1048576
	processes=$(cat /proc/sys/kernel/pid_max)
	if [ "$(ulimit -Hu)" != unlimited ] && [ "$(ulimit -Hu)" -lt "$processes" ]; then
		processes=$(ulimit -Hu)
	fi
	printf 'default_ulimits = ["nofile=%s:%s", "nproc=%s:%s"]\n' "$files" "$files" "$processes" "$processes"
	if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
		# crun refuses a v2 hierarchy beside v1 ones.
		printf '[engine]\nruntime = "runc"\n'
	fi
}

# configure_podman writes Podman's system-wide settings, unless somebody else did.
configure_podman() {
	if [ -e "$containers_conf" ] && ! grep -qxF "$marker" "$containers_conf"; then
		say "podman: $containers_conf is not ours and stays as it is"
		return
	fi
	mkdir -p "$(dirname "$containers_conf")"
	podman_config >"$containers_conf.new"
	mv "$containers_conf.new" "$containers_conf"
}

# use_overlay has the rootless user's Podman stack layers where the kernel can: its own
# choice without fuse is a copy of the whole image for each container. A store of copies
# that is there already is made anew.
use_overlay() {
	local home try
	[ "$(podman_rootless info --format '{{.Store.GraphDriverName}}' 2>/dev/null)" != overlay ] || return 0
	home=$(getent passwd "$rootless_user" | cut -d: -f6)
	try=$home/agentshim-overlay
	if podman_rootless --root "$try" --runroot "$try-run" --storage-driver overlay info >/dev/null 2>&1; then
		say "podman: overlay for $rootless_user"
		rm -rf "$home/.local/share/containers/storage"
		runuser -u "$rootless_user" -- mkdir -p "$home/.config/containers"
		printf '%s\n[storage]\ndriver = "overlay"\n' "$marker" >"$home/.config/containers/storage.conf"
	fi
	rm -rf "$try" "$try-run"
}

# open_tun lets rootless slirp4netns open the tun device.
open_tun() {
	if [ ! -e /dev/net/tun ]; then
		mkdir -p /dev/net
		mknod /dev/net/tun c 10 200
	fi
	chmod 0666 /dev/net/tun
}

# make_user NAME UID adds a user with a home folder.
make_user() {
	id "$1" >/dev/null 2>&1 && return
	say "adding user $1"
	useradd --create-home --user-group --uid "$2" --shell /bin/bash "$1" >/dev/null ||
		die "user $1 with uid $2 can't be added" "look whether uid $2 is taken: getent passwd $2"
}

# free_range prints a start after every range of the subordinate id file $1.
free_range() {
	awk -F: 'BEGIN { top = 100000 } $2 + $3 > top { top = $2 + $3 } END { printf "%d\n", top }' "$1"
}

# make_users adds the rootless Podman user with 65536 subordinate ids and the
# member of the docker group. Their uids differ from those the images name.
make_users() {
	local start
	make_user "$rootless_user" 24101
	make_user "$docker_user" 24102
	touch /etc/subuid /etc/subgid
	if ! grep -q "^$rootless_user:" /etc/subuid; then
		start=$(free_range /etc/subuid)
		usermod --add-subuids "$start-$((start + 65535))" "$rootless_user"
	fi
	if ! grep -q "^$rootless_user:" /etc/subgid; then
		start=$(free_range /etc/subgid)
		usermod --add-subgids "$start-$((start + 65535))" "$rootless_user"
	fi
	id -nG "$docker_user" | tr ' ' '\n' | grep -qx docker || usermod --append --groups docker "$docker_user"
}

engines() {
	start_dockerd
	configure_podman
	open_tun
	make_users
	use_overlay
}

# --- images -----------------------------------------------------------------

# podman_rootless runs Podman as the rootless user. Podman says that / is not a
# shared mount where it isn't: only mount propagation into containers is lost,
# and nothing here uses it.
podman_rootless() {
	local home
	home=$(getent passwd "$rootless_user" | cut -d: -f6)
	(cd / && timeout 300 runuser -u "$rootless_user" -- \
		env -i HOME="$home" USER="$rootless_user" LOGNAME="$rootless_user" \
		PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin podman "$@")
}

podman_root() { (cd / && timeout 300 podman "$@"); }

# holds STORE REFERENCE DIGEST: the store has that very image under that name.
holds() {
	local id
	id=$("$1" image inspect --format '{{.Id}}' "$2" 2>/dev/null) || return 1
	[ "${id#sha256:}" = "$3" ]
}

# load_images STORE ARCHIVE LIST loads the archive unless the store has all of
# the list, and fails if it has not got all of them then.
load_images() {
	local store=$1 archive=$2 list=$3 name digest loaded=false
	while read -r name digest; do
		holds "$store" "$name" "$digest" && continue
		if [ "$loaded" = false ]; then
			say "loading the test images: $store"
			"$store" load --quiet <"$archive" >/dev/null 2>"$archive.$store.err" || {
				cat "$archive.$store.err" >&2
				die "$store: the test images can't be loaded"
			}
			loaded=true
		fi
		holds "$store" "$name" "$digest" ||
			die "$store: after the load $name is not image $digest"
	done <"$list"
}

# with_archive COMMAND... makes the archive of the images named in the array
# names and runs COMMAND with its path and its list's path.
with_archive() {
	local work code=0
	work=$(mktemp -d)
	"$here/image.sh" "$work/images.tar" "${names[@]}" >"$work/list" || code=$?
	[ "$code" -ne 0 ] || ("$@" "$work/images.tar" "$work/list") || code=$?
	rm -rf "$work"
	[ "$code" -eq 0 ] || exit "$code"
}

load_everywhere() {
	local store pid pids=() code=0
	for store in docker_local podman_root podman_rootless; do
		load_images "$store" "$1" "$2" &
		pids+=("$!")
	done
	for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
	rm -f "$1".*.err
	[ "$code" -eq 0 ] || exit "$code"
}

images() {
	local names=("${all_images[@]}")
	with_archive load_everywhere
	debian_image clients
	debian_image agent
}

# apt_sources prints the machine's files of package sources.
apt_sources() {
	local file
	for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
		if [ -s "$file" ]; then printf '%s\n' "$file"; fi
	done
}

# debian_image NAME makes the image anew when a package has another version than in the
# kept one, and loads it.
debian_image() {
	local name=$1 key dir
	local -n packages=$1_packages npm=$1_npm
	key=$( (
		printf '%s\n' "${packages[@]}" "${npm[@]}"
		apt-cache policy "${packages[@]}" | grep Candidate
		cat "$here/image.sh"
		declare -f make_image install_npm
	) | sha256sum | cut -c1-16)
	dir=$image_cache/$name-$key
	if [ ! -e "$dir/list" ]; then
		rm -rf "$image_cache/$name"-*
		mkdir -p "$dir"
		make_image "$dir" "$name"
	fi
	load_everywhere "$dir/images.tar" "$dir/list"
}

# make_image DIR NAME writes the archive and, when it is whole, its list into DIR. The
# packages are in the arrays packages and npm.
make_image() {
	local dir=$1 name=$2 sources include hooks=()
	mapfile -t sources < <(apt_sources)
	include=$(IFS=,; echo "${packages[*]}")
	if [ ${#npm[@]} -gt 0 ]; then
		mkdir "$dir/npm"
		install_npm "$dir/npm" "${npm[@]}"
		hooks=(--customize-hook="cp -a '$dir'/npm/. \"\$1\"/usr/local/")
	fi
	# Nothing reads the manuals and translations; Java's installation wants the folder.
	slowly "making the image $name" 900 mmdebstrap --mode=root --variant=apt --quiet --include="$include" \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' --essential-hook='mkdir -p "$1"/usr/share/man/man1' "${hooks[@]}" \
		"$(. /etc/os-release && echo "$VERSION_CODENAME")" "$dir/layer.tar" "${sources[@]}"
	"$here/image.sh" "$dir/images.tar" "$name=$dir/layer.tar" >"$dir/list.new"
	rm -rf "$dir/layer.tar" "$dir/npm"
	mv "$dir/list.new" "$dir/list"
}

# install_npm PREFIX PACKAGE... installs as `npm install --global` does, but runs no scripts
# of the packages. Those of some agents would put the program for this machine in place of
# a stand-in: links do. Each program is kept once, and what only compilers read not at all.
install_npm() {
	local prefix=$1 program arch
	shift
	slowly 'fetching npm packages' 300 npm install --global --prefix "$prefix" --cache "$prefix/cache" \
		--ignore-scripts --libc=glibc --no-audit --no-fund --engine-strict=false "$@"
	rm -rf "$prefix/cache" "$prefix"/lib/node_modules/node-linux-*/{include,share}
	arch=$(uname -m | sed 's/x86_64/x64/; s/aarch64/arm64/')
	[ ! -e "$prefix/lib/node_modules/opencode-ai/node_modules/opencode-linux-$arch-baseline" ] ||
		rm -rf "$prefix/lib/node_modules/opencode-ai/node_modules/opencode-linux-$arch"
	for program in "$prefix"/lib/node_modules/{@anthropic-ai/claude-code/node_modules/@anthropic-ai/*/claude,opencode-ai/node_modules/*/bin/opencode}; do
		[ ! -x "$program" ] || ln -sfn "../${program#"$prefix"/}" "$prefix/bin/${program##*/}"
	done
}

soak() {
	all
	debian_image chromium
}

all() {
	packages
	engines
	images
}

bench() { install_packages "${bench_packages[@]}"; }

# --- hello ------------------------------------------------------------------

docker_caller() { timeout 60 docker "$@"; }
podman_caller() { timeout 300 podman "$@"; }

# refuse_remote ends with an error when Docker's client points at another machine.
refuse_remote() {
	local endpoint
	endpoint=$(docker_caller context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null || true)
	case $endpoint in
	'' | unix://*) ;;
	*) die "docker's endpoint $endpoint is not local" 'unset DOCKER_HOST and DOCKER_CONTEXT, or choose a local context' ;;
	esac
}

# find_engine sets engine to docker or podman, whichever answers the caller and
# exec would take, and leaves it empty if none does.
find_engine() {
	local wanted=${AGENTSHIM_ENGINE:-${DAGU_CONTAINER_RUNTIME:-}}
	engine=
	if [ "$wanted" != podman ] && have docker; then
		refuse_remote
		if docker_caller version --format '{{.Server.Version}}' >/dev/null 2>&1; then
			engine=docker
			return
		fi
	fi
	if [ "$wanted" != docker ] && have podman && podman_caller info >/dev/null 2>&1; then
		engine=podman
	fi
}

# install_engine gives root a running Docker where no engine answers.
install_engine() {
	[ "$(id -u)" -eq 0 ] || die "neither Docker nor Podman answers for user $(id -un)" \
		'join the docker group, or install podman, uidmap, slirp4netns and busybox-static, or run make run as root'
	have apt-get || die 'neither Docker nor Podman answers' \
		"install one with this system's package manager and start it"
	alone hello
	install_packages "${hello_packages[@]}"
	start_dockerd
}

hello() {
	local engine names=(hello)
	find_engine
	if [ -z "$engine" ]; then
		install_engine
		engine=docker
	fi
	if "${engine}_caller" image inspect agentshim/hello:test >/dev/null 2>&1; then return; fi
	if [ "$(id -u)" -eq 0 ] && ! have busybox && have apt-get; then install_packages busybox-static; fi
	with_archive load_images "${engine}_caller"
}

# --- main -------------------------------------------------------------------

# alone makes sure that one set-up at a time changes the machine.
alone() {
	need_root "$1" "integration/setup.sh $1"
	exec 9>"$setup_lock"
	flock --wait 1800 9 || die 'another set-up has been running for 30 minutes' "see who holds $setup_lock"
}

case ${1:-} in
packages | engines | images | all | soak | bench | stop)
	alone "$1"
	"$1"
	;;
hello) hello ;;
*) die 'usage: setup.sh packages|engines|images|all|hello|soak|bench|stop' ;;
esac
