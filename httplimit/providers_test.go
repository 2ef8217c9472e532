package httplimit_test

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit/httplimit"
)

// providers is how servers that many programs call refuse a request: the fields that matter, as
// their documentation or a recorded answer has them. Source is where that is to be read, and Seen
// when it was so: the date that the source bears, or on which it was read.
var providers = []struct {
	Name, Source, Seen string
	Status             int
	Header             []string // the Date is noon on 14 March 2026 without one
	Wait               time.Duration
}{
	{
		"OpenAI", "platform.openai.com/docs/guides/rate-limits", "2026-06-26", 429,
		[]string{
			"x-ratelimit-limit-requests", "60", "x-ratelimit-remaining-requests", "59", "x-ratelimit-reset-requests", "1s",
			"x-ratelimit-limit-tokens", "150000", "x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "6m0s",
		},
		6 * time.Minute,
	},
	{
		"OpenAI, by an answer", "community.openai.com/t/1268905", "2025-05-26", 429,
		[]string{
			"x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "12ms", "x-ratelimit-remaining-tokens", "0",
			"x-ratelimit-reset-tokens", "9ms", "x-ratelimit-remaining-tokens_usage_based", "0", "x-ratelimit-reset-tokens_usage_based", "9ms",
		},
		12 * time.Millisecond,
	},
	{
		"Azure, by its SDK", "github.com/Azure/azure-sdk-for-js, throttlingRetryStrategy", "2026-11-26", 429,
		[]string{"retry-after-ms", "1500", "retry-after", "2"},
		2 * time.Second,
	},
	{
		"Azure OpenAI", "learn.microsoft.com/en-us/answers/questions/5625878", "2025-11-17", 429,
		[]string{"retry-after-ms", "1500", "x-ratelimit-limit-tokens", "-1", "x-ratelimit-remaining-tokens", "-1", "x-ratelimit-reset-tokens", "0"},
		1500 * time.Millisecond,
	},
	{
		"Azure Cosmos DB", "github.com/jbmusso/gremlin-javascript/issues/113", "2026-11-26", 429,
		[]string{"x-ms-retry-after-ms", "73"},
		73 * time.Millisecond,
	},
	{
		"Anthropic", "docs.aws.amazon.com/claude-platform/latest/userguide/rate-limits.html", "2026-11-26", 429,
		[]string{
			"anthropic-ratelimit-requests-limit", "1000", "anthropic-ratelimit-requests-remaining", "999", "anthropic-ratelimit-requests-reset", "2026-03-14T12:00:01Z",
			"anthropic-ratelimit-input-tokens-remaining", "0", "anthropic-ratelimit-input-tokens-reset", "2026-03-14T12:00:41Z",
			"anthropic-ratelimit-output-tokens-remaining", "0", "anthropic-ratelimit-output-tokens-reset", "2026-03-14T12:00:20Z",
		},
		41 * time.Second,
	},
	{
		"Anthropic, with Retry-After", "learn.microsoft.com/en-us/microsoft-cloud/dev/dev-proxy/concepts/anthropic-529-overloaded-error", "2026-11-26", 529,
		[]string{"retry-after", "8", "anthropic-ratelimit-requests-remaining", "999", "anthropic-ratelimit-requests-reset", "2026-03-14T12:00:01Z"},
		8 * time.Second,
	},
	{
		"Groq", "console.groq.com/docs/rate-limits", "2026-11-26", 429,
		[]string{"x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "2m59.56s", "x-ratelimit-remaining-tokens", "17997", "x-ratelimit-reset-tokens", "7.66s"},
		2*time.Minute + 59560*time.Millisecond,
	},
	{
		"GitHub, primary limit", "docs.github.com/en/rest/using-the-rest-api/troubleshooting-the-rest-api", "2026-11-26", 403,
		[]string{"Date", "Tue, 20 Aug 2013 14:50:41 GMT", "x-ratelimit-limit", "60", "x-ratelimit-remaining", "0", "x-ratelimit-reset", "1377013266"},
		50*time.Minute + 25*time.Second,
	},
	{
		"GitHub, secondary limit", "docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api", "2026-11-26", 403,
		[]string{"retry-after", "60", "x-ratelimit-remaining", "4000", "x-ratelimit-reset", "1773492000"},
		time.Minute,
	},
	{
		"GitLab", "gitlab.com/gitlab-org/gitlab/-/issues/199738", "2020-01-30", 429,
		[]string{
			"Date", "Thu, 30 Jan 2020 14:14:16 GMT", "RateLimit-Limit", "600", "RateLimit-Observed", "5", "RateLimit-Remaining", "595",
			"RateLimit-Reset", "1580393717", "RateLimit-ResetTime", "Thu, 30 Jan 2020 14:15:17 GMT",
		},
		61 * time.Second,
	},
	{
		"Jira", "jira.atlassian.com/browse/JRACLOUD-69262", "2026-11-26", 429,
		[]string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "2026-03-14T12:03Z"},
		3 * time.Minute,
	},
	{
		"Discord", "docs.discord.com/developers/topics/rate-limits", "2026-11-26", 429,
		[]string{"X-RateLimit-Limit", "5", "X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489664.123", "X-RateLimit-Reset-After", "64.57", "X-RateLimit-Bucket", "abcd1234"},
		64570 * time.Millisecond,
	},
	{
		"Cloudflare", "developers.cloudflare.com/fundamentals/api/reference/limits", "2026-04-20", 429,
		[]string{"Ratelimit", `"default";r=0;t=30`, "Ratelimit-Policy", `"burst";q=100;w=60`},
		30 * time.Second,
	},
	{
		"Okta", "developer.okta.com/docs/reference/rl-best-practices", "2026-11-26", 429,
		[]string{"X-Rate-Limit-Limit", "1200", "X-Rate-Limit-Remaining", "0", "X-Rate-Limit-Reset", "1773489637"},
		37 * time.Second,
	},
	{
		"Smartsheet", "developers.smartsheet.com/api, throttling-and-rate-limiting", "2026-11-26", 429,
		[]string{"X-RateLimit-Limit", "120", "X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489642"},
		42 * time.Second,
	},
	{
		"Persona", "docs.withpersona.com/v2021-07-05/reference/rate-limiting", "2026-11-26", 429,
		[]string{"ratelimit-limit", "300", "ratelimit-remaining", "0", "ratelimit-reset", "53"},
		53 * time.Second,
	},
	{
		"lemlist", "developer.lemlist.com/api-reference/getting-started/rate-limits", "2026-11-26", 429,
		[]string{
			"Date", "Tue, 16 Feb 2021 08:02:40 GMT", "X-RateLimit-Limit", "20", "X-RateLimit-Remaining", "0",
			"X-RateLimit-Reset", "Tue Feb 16 2021 09:02:42 GMT+0100 (Central European Standard Time)",
		},
		2 * time.Second,
	},
	{
		"MailerLite", "developers-classic.mailerlite.com/docs/api-rate-limits", "2026-11-26", 429,
		[]string{"X-RateLimit-Limit", "60", "X-RateLimit-Remaining", "0", "X-RateLimit-Retry-After", "59"},
		59 * time.Second,
	},
	{
		"Binance, a ban", "academy.binance.com/en/articles/how-to-avoid-getting-banned-by-rate-limits", "2026-11-26", 418,
		[]string{"Retry-After", "120", "X-MBX-USED-WEIGHT-1M", "6100"},
		2 * time.Minute,
	},
	{
		"Imgur", "fluxoid.ru/ajmgur.html, a copy of api.imgur.com", "2026-11-26", 429,
		[]string{"X-RateLimit-UserLimit", "500", "X-RateLimit-UserRemaining", "0", "X-RateLimit-UserReset", "1773489660", "X-RateLimit-ClientLimit", "12500", "X-RateLimit-ClientRemaining", "12000"},
		time.Minute,
	},
	{
		"rack-attack, by its README", "github.com/rack/rack-attack/commit/557f88daa1cd2b8fac2c406229e6e5d9713a19c5", "2016-08-03", 429,
		[]string{"X-RateLimit-Limit", "60", "X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "2026-03-14 12:01:00 +0000"},
		time.Minute,
	},
	// These say too little, or what only their documentation can tell: the wait is not too short, and
	// bounded by MaxPause.
	{
		"Docker Hub", "docker.com/blog/checking-your-current-docker-pull-rate-limits-and-status", "2026-11-26", 429,
		[]string{"ratelimit-limit", "100;w=21600", "ratelimit-remaining", "0;w=21600"},
		500 * time.Millisecond,
	},
	{
		"Prisjakt, in milliseconds", "developer.prisjakt.nu/docs/sections/rate-limit", "2026-11-26", 429,
		[]string{"X-Rate-Limit-Limit", "10000", "X-Rate-Limit-Remaining", "0", "X-Rate-Limit-Reset", "600000"},
		600_000 * time.Second,
	},
}

// The client waits for as long as each provider says, and then sends the request again.
func TestTransportKeepsToProviders(t *testing.T) {
	for _, p := range providers {
		if _, err := time.Parse(time.DateOnly, p.Seen); err != nil || p.Source == "" {
			t.Errorf("%s: seen %q in %q, want a source and a date", p.Name, p.Seen, p.Source)
		}
		synctest.Test(t, func(t *testing.T) {
			s := newServer(func(n int, _ *http.Request) *http.Response {
				if n > 1 {
					return response(200)
				}
				resp := response(p.Status, p.Header...)
				if resp.Header.Get("Date") == "" {
					resp.Header.Set("Date", noon.Format(http.TimeFormat))
				}
				return resp
			})
			transport := newTransport(t, httplimit.TransportConfig{Base: s, MaxWait: 30 * 24 * time.Hour, MaxPause: 30 * 24 * time.Hour})
			resp, err := transport.RoundTrip(request(t, http.MethodGet, nil))
			if err != nil || resp.StatusCode != 200 || len(s.asked) != 2 || s.asked[1] < p.Wait || s.asked[1] > p.Wait+p.Wait/10+time.Second {
				t.Errorf("%s: got %v, %v, asked at %v, want again after %v", p.Name, resp, err, s.asked, p.Wait)
			}
		})
	}
}
