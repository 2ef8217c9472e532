package console

import (
	"fmt"
	"html/template"
	"math"
	"net/url"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// functions are the templates' functions.
var functions = template.FuncMap{
	"amount":   visible.Amount,
	"instant":  inspect.Instant,
	"span":     inspect.Span,
	"period":   visible.Period,
	"text":     visible.Text,
	"lines":    func(text string) []string { return strings.Split(text, "\n") }, // one fault a line
	"by":       func(c catalog.Change) string { return inspect.By(&c) },
	"percent":  func(share float64) string { return strconv.FormatFloat(math.Round(share*100), 'f', 0, 64) + " %" },
	"json":     func(text []byte) string { return visible.Text(string(text)) },
	"bounded":  bounded,
	"replaces": func(e *catalog.Entry) string { return inspect.Override(&e.Override) },
	"forAll":   func(key string) bool { return key == catalog.AllKeys },
	"address":  address,
}

// bounded writes a number of rows, or "over" the number up to which rows are counted.
func bounded(rows int) string {
	if rows > inspect.MostCounted {
		return fmt.Sprintf("over %d", inspect.MostCounted)
	}
	return strconv.Itoa(rows)
}

// address returns the address of this page with another value of a parameter; "" removes it.
func address(here *url.URL, name, value string) string {
	query := here.Query()
	query.Del("done")
	if query.Del(name); value != "" {
		query.Set(name, value)
	}
	there := url.URL{Path: here.Path, RawQuery: query.Encode()}
	return there.String()
}
