/* musl HOST PORT resolves the name as every libc program does and prints what the
   server sends first, after one byte, or where it failed. */
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG}, *list, *a;
	int err = getaddrinfo(argv[1], argv[2], &hints, &list);
	if (err) {
		printf("%s\n", gai_strerror(err));
		return 1;
	}
	for (a = list; a; a = a->ai_next) {
		int fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
		char c = 'x';
		if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen) && write(fd, &c, 1) == 1 && read(fd, &c, 1) == 1) {
			printf("got %c\n", c);
			return 0;
		}
		close(fd);
	}
	printf("not connected\n");
	return 1;
}
