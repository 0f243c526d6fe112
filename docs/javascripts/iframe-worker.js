// A browser starts no Worker from a page that was opened from disk. The search then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(frame, new URL(each, url))), Promise.resolve())
      this.load(frame, url).then(() => {
        this.inside = inside
        this.waiting.forEach((data) => this.postMessage(data))
      })
    }

    load(frame, url) {
      return new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        frame.contentDocument.head.append(script)
      })
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {}
  }
}
