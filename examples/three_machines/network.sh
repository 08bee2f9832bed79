#!/bin/sh
# Makes three machines of this one: network namespaces machine1 to machine3 at 10.0.0.1 to 10.0.0.3, joined to this network at 10.0.0.254.
# In a shell of its own, from `unshare --map-root-user --net --mount bash`, nothing of it is left when that shell ends.
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add pixiu0 type bridge
ip addr add 10.0.0.254/24 dev pixiu0
ip link set pixiu0 up
for number in 1 2 3; do
    ip netns add machine$number
    ip link add cable$number type veth peer name eth0 netns machine$number
    ip link set cable$number master pixiu0 up
    ip -n machine$number addr add 10.0.0.$number/24 dev eth0
    ip -n machine$number link set eth0 up
    ip -n machine$number link set lo up
done
