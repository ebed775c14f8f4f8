// Four worker threads count in shared memory, and the pool behind crypto and fs works.
import { Worker, isMainThread, workerData, parentPort } from 'node:worker_threads'
import { pbkdf2 } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { promisify } from 'node:util'

if (!isMainThread) {
  for (let i = 0; i < 1000; i++) Atomics.add(workerData, 0, 1)
  parentPort.postMessage('done')
} else {
  const count = new Int32Array(new SharedArrayBuffer(4))
  const run = () => new Promise((done, failed) => {
    new Worker(new URL(import.meta.url), { workerData: count }).on('message', done).on('error', failed)
  })
  const key = promisify(pbkdf2)('secret', 'salt', 1000, 16, 'sha256')
  await Promise.all([key, readFile(new URL(import.meta.url)), run(), run(), run(), run()])
  console.log(`counted ${count[0]}`)
}
