// Package mask keeps keys out of the logs of the middlewares.
package mask

import (
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit"
)

// Error returns the text of err without the keys of the requests that it is about. The
// error of a row that was locked names limit and key, for example.
func Error(err error, requests []ratelimit.Request) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	for _, r := range requests {
		if r.Key != "" {
			text = strings.ReplaceAll(text, strconv.Quote(r.Key), `"…"`)
		}
	}
	return text
}
