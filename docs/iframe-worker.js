// Search without a server: browsers start no workers from a folder, so the search runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.inner = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow
          inner.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.onload = () => resolve(inner)
          script.src = url
          inner.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    async postMessage(data) {
      const inner = await this.inner
      inner.dispatchEvent(new inner.MessageEvent("message", { data }))
    }
  }
}
