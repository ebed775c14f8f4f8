"""Threads, processes with a lock, a queue and shared memory, and children of asyncio."""
import asyncio
import multiprocessing
import threading


def work(lock, total, queue):
    for _ in range(100):
        with lock:
            total.value += 1
    queue.put("done")


async def child():
    p = await asyncio.create_subprocess_exec("echo", "child", stdout=asyncio.subprocess.PIPE)
    return (await p.communicate())[0].decode().strip()


def main():
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        lock, total, queue = context.Lock(), context.Value("i", 0), context.Queue()
        running = [context.Process(target=work, args=(lock, total, queue)) for _ in range(2)]
        for p in running:
            p.start()
        for p in running:
            queue.get(timeout=20)
            p.join(20)
        assert total.value == 200, (method, total.value)
    with multiprocessing.Pool(2) as pool:
        assert sum(pool.map(abs, range(-9, 1))) == 45
    seen = []
    threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print("threads", len(seen), "processes", total.value, asyncio.run(child()))


if __name__ == "__main__":
    main()
