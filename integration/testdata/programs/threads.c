/* Two threads and a child that was forked. */
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static void *count(void *n)
{
	__atomic_add_fetch((int *)n, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

int main(void)
{
	pthread_t threads[2];
	int n = 0, status = 0;
	for (int i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, count, &n) != 0)
			return 1;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	if (fork() == 0)
		_exit(n);
	wait(&status);
	printf("threads %d child %d\n", n, WEXITSTATUS(status));
	return 0;
}
